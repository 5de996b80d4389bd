--[[
A node leaves the group: its agent after suspending nothing, or an operator who knows that it is gone.
ARGV  1 floor  2 node  3 who: 'agent', or the name of an operator
Reply ok | unknown
Events NodeLeft, and what advance emits
--]]
-- @include group waiters residency lease advance
local node = ARGV[2]

begin(true)
if not redis.call('ZSCORE', nodes_key, node) then
  return { 'unknown' }
end
settle_clock()
redis.call('ZREM', nodes_key, node)
local jobs = {}
local flat = redis.call('HGETALL', members_key)
for i = 1, #flat, 2 do
  local owner, job = string.match(flat[i], '^([^/]+)/([^/]+)/')
  if owner == node then
    redis.call('HDEL', members_key, flat[i])
    jobs[job] = true
  end
end
for job in pairs(jobs) do
  if job ~= '@' and job ~= S.job then
    job_recompute(job)
  end
end
emit('NodeLeft', 'node', node, 'by', ARGV[3])
set('changed_ms', now)
wake('members')
reap()
advance()
save()
return { 'ok' }
