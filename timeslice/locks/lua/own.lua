--[[
A coordinator takes or keeps a group, and does the group's housekeeping. Its own deadline is the lease.
ARGV  1 floor  2 coordinator  3 ttl_ms  4 its instance: another of the same name is another
Reply mine epoch counter | other owner ms_left (owner '': no served group)
Events OwnerChanged, and what advance and reap emit
--]]
-- @include group waiters gangs residency lease advance
local coordinator, ttl_ms, instance = ARGV[2], tonumber(ARGV[3]), ARGV[4]

begin(true)
if S.mode ~= 'served' then
  return { 'other', '', 0 } -- gone or lock-only: nothing to own, and nothing to bring back to life
end
settle_clock() -- first: neither an outage nor a clock step takes a group from its owner
local mine = S.owner == coordinator and (redis.call('HGET', state_key, 'owner_instance') or '') == instance
if S.owner ~= '' and not mine and S.owner_deadline_ms >= now then
  save()
  return { 'other', S.owner, S.owner_deadline_ms - now }
end
if not mine then
  set('owner', coordinator)
  set('owner_instance', instance)
  set('owner_epoch', draw())
  emit('OwnerChanged', 'owner', coordinator, 'epoch', digits(S.owner_epoch))
end
set('owner_deadline_ms', now + ttl_ms)
reap()
advance()
save()
return { 'mine', S.owner_epoch, S.counter }
