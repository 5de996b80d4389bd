--[[
Removes a group that nobody uses.
ARGV  1 floor
Reply ok | unknown | refused why
--]]
-- @include group
begin(true)
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
return { 'ok' }
