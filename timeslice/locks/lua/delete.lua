--[[
Removes a group that nobody uses.
ARGV  1 floor  2 id of this request
Reply ok | unknown | refused why
--]]
-- @include group waiters
local request = ARGV[2]

begin(true)
if has_ended(request) then
  return { 'ok' } -- even if somebody made the group anew since
end
if S.mode == '' and redis.call('EXISTS', state_key, queue_key, config_key) == 0 then
  return { 'unknown' }
end
local why
if S.lease_id ~= '' and S.deadline_ms >= now then
  why = 'job ' .. S.job .. ' holds it'
elseif S.swap_id ~= 0 then
  why = 'a swap is under way'
elseif redis.call('ZCOUNT', alive_key, digits(now), '+inf') > 0 then
  why = 'jobs are waiting for it'
elseif redis.call('ZCOUNT', nodes_key, digits(now), '+inf') > 0 then
  why = 'agents serve it'
end
if why then
  return { 'refused', why }
end
for _, waiter in ipairs(redis.call('ZRANGE', queue_key, 0, -1)) do
  redis.call('DEL', grant_prefix .. waiter)
end
redis.call('DEL', state_key, queue_key, waiters_key, alive_key, ended_key, jobs_key, members_key, nodes_key, inbox_key,
  events_key, config_key, targets_key)
remember_ended(request)
redis.call('PEXPIRE', ended_key, ENDED_KEEP_MS)
return { 'ok' }
